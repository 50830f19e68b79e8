-- One row per block: block_rows physical rows that a key group shuffles together in one pass. The position p of the pass reads
-- row (a * p + c) mod block_rows of the block.
CREATE OR REPLACE VIEW blocks AS
SELECT DISTINCT cut_id, plan_id, pass, key_group, block, block_rows, block_live_rows, a, a_inv, c
FROM slices;

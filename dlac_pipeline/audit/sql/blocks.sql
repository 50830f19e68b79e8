-- One row per block: block_rows physical rows that a key group shuffles together in one pass, by
-- position -> (a * position + c) mod block_rows.
CREATE OR REPLACE VIEW blocks AS
SELECT DISTINCT cut_id, plan_id, pass, key_group, block, block_rows, block_live_rows, a, a_inv, c
FROM slices;

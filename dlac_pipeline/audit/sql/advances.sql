-- What the checkpoints of the surviving lineages moved: positions [position_start, position_end) of a block.
CREATE OR REPLACE VIEW advances AS
SELECT
    a.run, a.checkpoint_id, a.seq, a.leg, a.cut_id, a.plan_id, a.pass, a.key_group, a.block,
    a.position_start, a.position_end, a.first_step, a.last_step,
    a.rows_consumed, a.rows_dead, a.rows_quarantined, a.token_start, a.token_end, a.applied
FROM consumption AS a JOIN lineage AS l ON l.run = a.run AND l.checkpoint_id = a.checkpoint_id
WHERE a.kind = 'advance';

-- What the checkpoints of the surviving lineages moved: positions [position_start, position_end) of a block. Those before
-- read_to are done with; the row behind it, if there is one, was read only up to token_end, and the next advance goes on there.
-- plan_id is the plan whose dead rows were passed over; source and pass name the cut within the run.
CREATE OR REPLACE VIEW advances AS
SELECT
    a.run, a.checkpoint_id, a.seq, a.leg, a.source, a.cut_id, a.plan_id, a.pass, a.key_group, a.block,
    a.position_start, a.position_end, a.position_end - (a.token_end IS NOT NULL)::BIGINT AS read_to,
    a.first_step, a.last_step, a.rows_consumed, a.rows_dead, a.rows_filtered, a.rows_quarantined, a.token_start, a.token_end,
    a.filtered, a.quarantined, a.applied, a.detail
FROM consumption AS a JOIN lineage AS l ON l.run = a.run AND l.checkpoint_id = a.checkpoint_id
WHERE a.kind = 'advance';

-- One row per advance of a checkpoint on a surviving lineage: it moved over positions [position_start, position_end) of a
-- block. Rows before read_to are finished. If token_end is set, the row at read_to was read only up to that token, and the next
-- advance continues there. plan_id is the plan whose dead rows were passed over. source and pass name the cut within the run.
CREATE OR REPLACE VIEW advances AS
SELECT
    a.run, a.checkpoint_id, a.seq, a.leg, a.source, a.cut_id, a.plan_id, a.pass, a.key_group, a.block,
    a.position_start, a.position_end, a.position_end - (a.token_end IS NOT NULL)::BIGINT AS read_to,
    a.first_step, a.last_step, a.rows_consumed, a.rows_dead, a.rows_filtered, a.rows_quarantined, a.token_start, a.token_end,
    a.filtered, a.quarantined, a.quarantine_reasons, a.applied
FROM consumption AS a JOIN lineage AS l ON l.run = a.run AND l.checkpoint_id = a.checkpoint_id
WHERE a.kind = 'advance';

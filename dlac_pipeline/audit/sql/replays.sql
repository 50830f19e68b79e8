-- One row per range of positions that a step on a surviving lineage read again, because the step before it with these rows was
-- not applied. `applied` is false if this step was not either.
CREATE OR REPLACE VIEW replays AS
SELECT a.run, a.checkpoint_id, a.seq, a.leg, a.source, a.cut_id, a.pass, a.key_group, a.block, a.position_start, a.position_end,
    a.first_step AS step, a.rows_consumed, a.applied
FROM consumption AS a JOIN lineage AS l ON l.run = a.run AND l.checkpoint_id = a.checkpoint_id
WHERE a.kind = 'replay';

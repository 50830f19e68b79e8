-- One row per committed checkpoint, on the surviving lineage of its run or not, retired or not. `adopted` says where one came
-- from that others wrote: what that has seen before, nobody knows.
CREATE OR REPLACE VIEW checkpoints AS
SELECT
    run, seq, attempt, checkpoint_id, parent, step, leg, committed_at, world_size, manifest_uri, model_digest,
    applied_steps, skipped_steps, losses, detail ->> '$.adopted' AS adopted
FROM consumption
WHERE kind = 'checkpoint';

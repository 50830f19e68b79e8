-- One row per committed checkpoint, on the surviving lineage of its run or not, retired or not. A forked one is a copy of
-- `forked_from`, at step forked_step of the run forked_run. The models of both have seen the same rows. `adopted` is the folder
-- of files that a checkpoint was made from. If they were exported from a checkpoint of this lakehouse, that is `forked_from`. Else
-- the rows that they had seen are unknown.
CREATE OR REPLACE VIEW checkpoints AS
SELECT
    c.run, c.seq, c.attempt, c.checkpoint_id, c.parent, c.step, c.leg, c.committed_at, c.world_size, c.manifest_uri,
    c.model_digest, c.applied_steps, c.skipped_steps, c.losses, c.checkpoint.adopted,
    f.fork.parent_run AS forked_run, f.fork.parent_checkpoint AS forked_from, f.fork.parent_step AS forked_step
FROM consumption AS c LEFT JOIN (
    SELECT run, checkpoint_id, fork FROM consumption WHERE kind = 'fork'
) AS f USING (run, checkpoint_id)
WHERE c.kind = 'checkpoint';

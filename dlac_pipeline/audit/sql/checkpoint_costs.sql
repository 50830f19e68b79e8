-- One row per checkpoint with its cost: bytes, and seconds of its slowest rank. Training waited for stall_s (NULL: for the whole
-- checkpoint). sync_s, upload_s and digest_s are seconds of threads that work during writing, and seal_s is the time that they
-- took longer. reason: steps, seconds, auto, end, left (the script exited) or the termination notice. interval_s is the
-- interval between checkpoints at that time, and why is the reason for it. Rows that were rebuilt from a manifest have none.
CREATE OR REPLACE VIEW checkpoint_costs AS
SELECT
    run, seq, checkpoint_id, step, committed_at,
    checkpoint.bytes,
    checkpoint.phases['stall'] AS stall_s,
    checkpoint.phases['copy'] AS copy_s,
    checkpoint.phases['write'] AS write_s,
    checkpoint.phases['seal'] AS seal_s,
    checkpoint.phases['sync'] AS sync_s,
    checkpoint.phases['digest'] AS digest_s,
    checkpoint.phases['upload'] AS upload_s,
    checkpoint.phases['vote'] AS vote_s,
    reason,
    checkpoint.interval_s,
    checkpoint.why
FROM consumption
WHERE kind = 'checkpoint' AND cardinality(checkpoint.phases) > 0;

-- One row per checkpoint with its cost: bytes, and seconds of its slowest rank. Training waited for stall_s (NULL: for the whole
-- checkpoint). sync_s, upload_s and digest_s are seconds of threads that work during writing, and seal_s is the time that they
-- took longer. reason: steps, seconds, auto, end, left (the script exited) or the termination notice. interval_s is the
-- interval between checkpoints at that time, and why is the reason for it.
CREATE OR REPLACE VIEW checkpoint_costs AS
SELECT
    run, seq, checkpoint_id, step, committed_at,
    (detail ->> '$.bytes')::BIGINT AS bytes,
    (detail ->> '$.phases.stall')::DOUBLE AS stall_s,
    (detail ->> '$.phases.copy')::DOUBLE AS copy_s,
    (detail ->> '$.phases.write')::DOUBLE AS write_s,
    (detail ->> '$.phases.seal')::DOUBLE AS seal_s,
    (detail ->> '$.phases.sync')::DOUBLE AS sync_s,
    (detail ->> '$.phases.digest')::DOUBLE AS digest_s,
    (detail ->> '$.phases.upload')::DOUBLE AS upload_s,
    (detail ->> '$.phases.vote')::DOUBLE AS vote_s,
    detail ->> '$.reason' AS reason,
    (detail ->> '$.interval_s')::DOUBLE AS interval_s,
    detail ->> '$.why' AS why
FROM consumption
WHERE kind = 'checkpoint' AND detail IS NOT NULL;

-- What each checkpoint cost: bytes, and seconds of its slowest rank. Training waited for stall_s; NULL: for all of it. Sealing
-- (sync or upload, and digests, in seconds of threads) goes on beside writing; seal_s is what it took longer.
-- And why it was taken: steps, seconds, auto, end, left (by the script), or the notice that the run had; interval_s and why as they
-- were then.
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

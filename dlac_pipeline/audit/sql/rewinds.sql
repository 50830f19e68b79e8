-- One row per rewind: the run went back from left_checkpoint (at left_step) to checkpoint_id (at step).
CREATE OR REPLACE VIEW rewinds AS
SELECT
    run, seq, attempt, committed_at AS rewound_at, checkpoint_id, step,
    rewind.left_checkpoint, rewind.left_step, rewind.exclude AS excluded, rewind.why
FROM consumption
WHERE kind = 'rewind';

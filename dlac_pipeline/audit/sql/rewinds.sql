-- One row per rewind: the run went back from left_checkpoint (at left_step) to checkpoint_id (at step).
CREATE OR REPLACE VIEW rewinds AS
SELECT
    run, seq, attempt, committed_at AS rewound_at, checkpoint_id, step,
    detail ->> '$.from' AS left_checkpoint,
    (detail ->> '$.from_step')::BIGINT AS left_step,
    from_json(detail -> '$.exclude', '[{"source": "INTEGER", "where": "VARCHAR"}]') AS excluded,
    detail ->> '$.why' AS why
FROM consumption
WHERE kind = 'rewind';

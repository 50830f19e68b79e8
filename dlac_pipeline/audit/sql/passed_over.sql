-- One row per position whose row the transform left out (filtered), or refused (quarantined, with the reason).
CREATE OR REPLACE VIEW passed_over AS
WITH named AS (
    SELECT run, checkpoint_id, source, cut_id, pass, key_group, block, unnest(filtered) AS position, 'filtered' AS kind,
        NULL AS reason
    FROM advances
    WHERE filtered IS NOT NULL
    UNION ALL
    SELECT run, checkpoint_id, source, cut_id, pass, key_group, block, unnest(quarantined), 'quarantined',
        unnest(quarantine_reasons)
    FROM advances
    WHERE quarantined IS NOT NULL
)
FROM named;

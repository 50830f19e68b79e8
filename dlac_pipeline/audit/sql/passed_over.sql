-- One row per position whose row the transform left out (filtered), or refused (quarantined, with the reason).
CREATE OR REPLACE VIEW passed_over AS
WITH named AS (
    SELECT run, checkpoint_id, source, cut_id, pass, key_group, block, unnest(filtered) AS position, 'filtered' AS kind,
        NULL AS detail
    FROM advances
    WHERE filtered IS NOT NULL
    UNION ALL
    SELECT run, checkpoint_id, source, cut_id, pass, key_group, block, unnest(quarantined), 'quarantined', detail
    FROM advances
    WHERE quarantined IS NOT NULL
)
SELECT * EXCLUDE (detail), CASE WHEN json_valid(detail)
    THEN json_extract_string(detail, format('$.quarantined."{}"', position)) END AS reason
FROM named;

-- One row per failure of the last 90 days: who noticed it, the outcome, and the seconds until the run trained again.
SELECT run, seq, attempt, failed_at, noticed_by, outcome, detect_s, total_s
FROM recoveries
WHERE failed_at >= now() - INTERVAL 90 DAY
ORDER BY failed_at;

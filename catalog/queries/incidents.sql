-- The last 100 failures: who noticed each, its outcome, and the seconds until the run trained again.
SELECT run, seq, attempt, failed_at, noticed_by, outcome, detect_s, total_s
FROM recoveries
ORDER BY failed_at DESC
LIMIT 100;

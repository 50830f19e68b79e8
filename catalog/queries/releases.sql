-- One row per exported file of weights: its digest, the checkpoint it was made of, and the rows consumed up to it.
SELECT e.file, e.file_digest, e.run, e.checkpoint_id, e.step, e.exported_at, sum(a.rows_consumed)::BIGINT AS rows_consumed
FROM exports AS e, ancestors(e.checkpoint_id) AS b, consumption AS a
WHERE a.checkpoint_id = b.checkpoint_id AND a.kind = 'advance'
GROUP BY ALL
ORDER BY e.exported_at;

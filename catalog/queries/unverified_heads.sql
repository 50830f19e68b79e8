-- Runs whose newest checkpoint has not been read again within a week. `dlac checkpoint verify RUN` reads it.
SELECT l.run, l.checkpoint_id, l.step, max(v.verified_at) FILTER (v.problem IS NULL) AS verified_at
FROM lineage AS l LEFT JOIN verifications AS v USING (run, checkpoint_id)
WHERE l.is_head
GROUP BY ALL
HAVING coalesce(verified_at, '-infinity'::TIMESTAMPTZ) < now() - INTERVAL 7 DAY
ORDER BY l.run;

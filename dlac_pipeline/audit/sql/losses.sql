SELECT c.step, coalesce(p.step, 0) AS from_step, c.losses
FROM lineage AS c LEFT JOIN lineage AS p ON p.run = c.run AND p.checkpoint_id = c.parent
WHERE c.run = ?
ORDER BY c.step

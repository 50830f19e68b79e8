-- One row per checkpoint of the surviving chain of a run: the head, named by the row with the greatest seq, and its ancestors.
-- The order is that of seq, not of a clock. A rewind or a quarantine names an older head and abandons the later checkpoints.
CREATE OR REPLACE VIEW lineage AS
WITH RECURSIVE
heads AS (
    SELECT DISTINCT c.run, c.head_after AS checkpoint_id
    FROM consumption AS c JOIN (SELECT run, max(seq) AS seq FROM consumption GROUP BY run) AS newest USING (run, seq)
),
walk AS (
    SELECT b.run, b.branch, b.seq AS upto, b.branch_parent
    FROM heads JOIN branch_checkpoints AS b USING (run, checkpoint_id)
    UNION
    -- A parent is always older: the comparison ends the walk even in a damaged ledger.
    SELECT b.run, b.branch, b.seq, b.branch_parent
    FROM walk JOIN branch_checkpoints AS b
        ON b.run = walk.run AND b.checkpoint_id = walk.branch_parent AND b.seq < walk.upto
)
SELECT c.*, row_number() OVER (PARTITION BY c.run ORDER BY c.seq DESC) = 1 AS is_head
FROM walk
JOIN branch_checkpoints AS b ON b.run = walk.run AND b.branch = walk.branch AND b.seq <= walk.upto
JOIN checkpoints AS c ON c.run = b.run AND c.checkpoint_id = b.checkpoint_id AND c.seq = b.seq;

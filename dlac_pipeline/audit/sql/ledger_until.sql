-- The ledger and the plans as they were at a moment: of the runs in `certified_runs` (run, seq) up to a seq, and of others up to a
-- time. Formatted with that time, and with TABLE or VIEW, which the tables are.
ALTER {kind} consumption RENAME TO consumption_now;
CREATE {kind} consumption AS
SELECT n.*
FROM consumption_now AS n LEFT JOIN certified_runs AS c ON c.run = n.run
WHERE CASE WHEN c.run IS NULL THEN n.committed_at <= {at}::TIMESTAMPTZ ELSE n.seq <= c.seq END;
ALTER {plans_kind} plans RENAME TO plans_now;
CREATE {plans_kind} plans AS FROM plans_now WHERE created_at <= {at}::TIMESTAMPTZ;

-- The work units of the plans.
SELECT DISTINCT write_id FROM plans;

-- One row per cut and plan under which it was read: the plan that was cut, and after exclusions plans with more dead rows.
-- There are few, and a list tells that to DuckDB. Of a DISTINCT it expects about as many rows as there are advances, and would
-- rather keep those in memory than these.
CREATE OR REPLACE VIEW cut_plans AS
SELECT pair.cut_id, pair.plan_id
FROM (SELECT unnest(list(DISTINCT {'cut_id': cut_id, 'plan_id': plan_id})) AS pair FROM consumption WHERE kind = 'advance');

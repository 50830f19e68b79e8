-- One row per cut and plan under which it was read: the plan that was cut, and after exclusions plans with more dead rows.
CREATE OR REPLACE VIEW cut_plans AS
SELECT DISTINCT cut_id, plan_id
FROM consumption
WHERE kind = 'advance';

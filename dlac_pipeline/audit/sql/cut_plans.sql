-- The plans under which each cut was read: that whose units were cut, and after exclusions others, with more dead rows.
CREATE OR REPLACE VIEW cut_plans AS
SELECT DISTINCT cut_id, plan_id
FROM consumption
WHERE kind = 'advance';

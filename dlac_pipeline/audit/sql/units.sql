-- One row per work unit of a plan, by the write id that the plan names. A crash or a race may leave units without a plan.
CREATE OR REPLACE VIEW units AS
SELECT p.plan_id, u.unit, u.file_path, u.row_group, u.first_row, u.rows, u.live_rows, u.dead
FROM plans AS p JOIN work_units AS u USING (write_id);

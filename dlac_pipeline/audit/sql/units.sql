-- The work units of each plan. A plan row names the write id of its units: units that a crash or a race left have no plan.
CREATE OR REPLACE VIEW units AS
SELECT p.plan_id, u.unit, u.file_path, u.row_group, u.first_row, u.rows, u.live_rows, u.dead
FROM plans AS p JOIN work_units AS u USING (write_id);

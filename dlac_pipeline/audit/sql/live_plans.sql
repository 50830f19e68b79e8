-- One row per cut and leg: plan_id was cut, and from this leg on the dead rows of live_plan_id are passed over.
CREATE OR REPLACE VIEW live_plans AS
SELECT c.run, c.source, c.pass, c.cut_id, l.leg, l.plan_id, l.live_plan_id
FROM cuts AS c JOIN leg_cuts AS l
    ON l.run = c.run AND l.source = c.source AND c.pass >= l.first_pass AND c.pass <= coalesce(l.last_pass, c.pass);

-- One row per run: its effective training time ratio, and the sums of attempt_times. wall_s is the time from the first claim to
-- the last sign of life. ettr is the share of trained_s in the time in which the run was to train: wall_s without idle_s. It is
-- a lower bound. ettr_at_most is the upper one, with unknown_s as trained.
CREATE OR REPLACE VIEW goodput AS
SELECT
    run, min(from_at) AS began_at, max(to_at) AS ended_at,
    (epoch_us(max(to_at)) - epoch_us(min(from_at)))::DECIMAL(18, 0) * 0.000001::DECIMAL(6, 6) AS wall_s,
    sum(trained_s) AS trained_s, sum(abandoned_s) AS abandoned_s, sum(replayed_s) AS replayed_s,
    sum(checkpointing_s) AS checkpointing_s, sum(down_s) AS down_s, sum(startup_s) AS startup_s, sum(idle_s) AS idle_s,
    sum(unknown_s) AS unknown_s,
    (sum(trained_s) / nullif(wall_s - sum(idle_s), 0))::DOUBLE AS ettr,
    ((sum(trained_s) + sum(unknown_s)) / nullif(wall_s - sum(idle_s), 0))::DOUBLE AS ettr_at_most
FROM attempt_times
GROUP BY run;

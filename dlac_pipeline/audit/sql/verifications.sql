-- One row per verification of a checkpoint, which reads its files again. `problem` is NULL if every digest matched.
CREATE OR REPLACE VIEW verifications AS
SELECT
    v.run, v.seq, v.checkpoint_id, c.step, v.committed_at AS verified_at, v.verify.verification, v.verify.problem
FROM consumption AS v JOIN consumption AS c ON c.run = v.run AND c.checkpoint_id = v.checkpoint_id AND c.kind = 'checkpoint'
WHERE v.kind = 'verify';

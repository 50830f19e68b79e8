-- A value as it stands in a sentence; a NULL inside format() would swallow the sentence.
CREATE OR REPLACE MACRO said(value) AS coalesce(value::VARCHAR, 'nothing');

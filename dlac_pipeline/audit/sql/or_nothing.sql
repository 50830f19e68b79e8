-- The text of a value, 'nothing' for NULL. A NULL inside format() would make the whole sentence NULL.
CREATE OR REPLACE MACRO or_nothing(value) AS coalesce(value::VARCHAR, 'nothing');

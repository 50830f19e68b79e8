-- No extension is loaded, and no variable of this process is found by its name.
SET allow_persistent_secrets = false;
SET allow_community_extensions = false;
SET autoinstall_known_extensions = false;
SET autoload_known_extensions = false;
SET python_enable_replacements = false;

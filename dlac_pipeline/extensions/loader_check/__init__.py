"""The scenarios that show whether a loader resumes exactly, for any loader.

In: a file that defines a loader. It runs in a process of its own (`host`), whose ranks are killed, resized and resumed
(`scenarios`) over generated tables (`tables`). Out: the rows repeated and missing, from what each rank logged (`consume`).
"""

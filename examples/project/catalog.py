"""The lakehouse of this project: the source table that its run reads."""

TABLE = "demo.points"

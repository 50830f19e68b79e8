"""Resources: the lakehouse of jobs and source assets, and the heartbeat of a Dagster run that trains."""

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from dlac_pipeline.dagster.heartbeat import Heartbeat
from dlac_pipeline.lakehouse.config import LakehouseConfig, home_folder

if TYPE_CHECKING:
    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse

HEARTBEAT = "dlac_heartbeat"
"""Key of the resource that the assets of training runs share."""


@dg.resource(description="Heartbeat of the process of a Dagster run that trains.")
def heartbeat_resource(context: dg.InitResourceContext) -> Iterator[Heartbeat]:
    """Yield the heartbeat while the Dagster run uses the resource."""
    assert context.instance is not None
    assert context.run_id is not None
    with closing(Heartbeat(context.instance, context.run_id)) as heartbeat:
        yield heartbeat


class LakehouseResource(dg.ConfigurableResource[Any]):
    """The embedded lakehouse of $DLAC_HOME, or a named lakehouse, as in a job spec."""

    type: str = ""
    uri: str = ""
    warehouse: str = ""
    name: str | None = None
    namespace: str = "dlac"
    properties: dict[str, str] = Field(default_factory=dict)

    def lakehouse(self) -> "Lakehouse":
        """The open lakehouse."""
        from dlac_pipeline.lakehouse.iceberg.connect import connect

        given = {name: getattr(self, name) for name in LakehouseConfig.model_fields}
        return connect(LakehouseConfig.model_validate(given).at_home(home_folder()))

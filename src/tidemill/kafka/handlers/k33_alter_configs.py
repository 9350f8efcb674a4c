"""Handler of AlterConfigs (33), versions 0 to 2: replaces all configs of a topic or group; the others become defaults.

Otherwise it is like IncrementalAlterConfigs, which Kafka recommends, because AlterConfigs removes the configs that
others have set.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.kafka.api.context import Context
from tidemill.kafka.api.dispatch import Api, Request, begin_decoded
from tidemill.kafka.handlers import k44_incremental_alter_configs as incremental
from tidemill.kafka.schema.codec_compiler import Body
from tidemill.topics.config.alter import AlterOp, ConfigKind, apply_changes


async def handle(context: Context, request: Request, body: Body) -> Body:
    def change(_: Mapping[str, str], asked: Body, kind: ConfigKind) -> dict[str, str]:
        return apply_changes({}, [(config["name"], AlterOp.SET, config["value"]) for config in asked["configs"]], kind)

    return {"responses": await incremental.alter_all(context, body, change)}


API = Api(33, "alter_configs", 0, 2, begin_decoded(handle, incremental.error_answer), barrier=True)

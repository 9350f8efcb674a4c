"""Entry point that Spark discovers: it imports every installed package named `pyspark_*` and uses its `DefaultSource`.

`spark.read.format("tidemill")` therefore needs no registration. With a PySpark that is too old for the data source,
`DefaultSource` is not defined: an error would cost the session the data sources of all other packages too.
"""

import warnings

try:
    from tidemill.spark.source import TidemillSource as DefaultSource
except ImportError as error:
    warnings.warn(f'format("tidemill") is not available: {error}. Install tidemill[spark].', stacklevel=2)
else:
    __all__ = ["DefaultSource"]

"""What Spark finds by itself: it imports every installed package named `pyspark_*` and takes its `DefaultSource`.

`spark.read.format("tidemill")` therefore needs no registration. Where PySpark is older than the data source needs,
there is none here: an error would cost the session the data sources of all other packages too.
"""

import warnings

try:
    from tidemill.spark.source import TidemillSource as DefaultSource
except ImportError as error:
    warnings.warn(f'format("tidemill") is not available: {error}. Install tidemill[spark].', stacklevel=2)
else:
    __all__ = ["DefaultSource"]

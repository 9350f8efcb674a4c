"""support: the helpers of the tests, one package for each room of the product.

A helper that two test files need lives here and is imported as `support.ROOM.MODULE`. No test file imports another test
file. The root conftest registers this package, so that pytest explains the assertions of every module in it.
"""

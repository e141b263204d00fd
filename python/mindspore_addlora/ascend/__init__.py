"""MindSpore on Ascend: aclnnAddLora as one operator for PyNative, GRAPH_MODE and ``ms.jit``."""

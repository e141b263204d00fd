"""The errors of the operator, alike on every backend."""

from __future__ import annotations


class AddLoraError(ValueError):
    """A call that the rules refuse; nothing was written.

    Args:
        code (int): aclnn's code: 161001 for an argument that is missing, 161002 for an invalid dtype, buffer or
            executor, 561002 for shapes, scalars and indices.
        message (str): The argument, what was expected and what came.

    Examples:
        >>> from mindspore_addlora import raw
        >>> try:
        ...     raw.add_lora(None, None, None, None)
        ... except raw.AddLoraError as error:
        ...     print(error.code, error)
        161001 y: expected a tensor, got None
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return self.message


class AclError(RuntimeError):
    """A call into CANN that failed.

    Args:
        code (int): CANN's code; 0 where the function that failed has none (aclCreateTensor).
        message (str): The function that failed, and CANN's own text.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return self.message

from mimo.tasks.arithmetic.task import ArithmeticTask

__all__ = ['ArithmeticTask']

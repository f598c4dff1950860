from mimo.tasks.repair.task import POLICY_DIR, RepairTask

__all__ = ['POLICY_DIR', 'RepairTask']

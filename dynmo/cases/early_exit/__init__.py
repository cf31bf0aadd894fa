from dynmo.cases.early_exit.options import EarlyExit as EarlyExit

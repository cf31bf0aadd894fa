from dynmo.cases.pruning.options import Pruning as Pruning

from dynmo.cases.freezing.options import Freezing as Freezing

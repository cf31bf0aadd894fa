from dynmo.cases.experts.options import Experts as Experts

from dynmo.cases.mixture_of_depths.options import MixtureOfDepths as MixtureOfDepths

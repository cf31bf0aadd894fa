"""F, B and W of one layer, stages, frozen prefixes, accumulation and buffers."""

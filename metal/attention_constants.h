// The function constants of both attention kernels. The other constants are beside their kernel.

constant int BLOCK_SIZE [[function_constant(0)]];
constant bool CAUSAL [[function_constant(1)]];
constant bool HAS_WINDOW [[function_constant(2)]];
constant bool HAS_SOFTCAP [[function_constant(3)]];
constant bool HAS_SINKS [[function_constant(7)]];
constant bool SPLIT [[function_constant(10)]];
constant bool VALUES_IN_KEYS [[function_constant(12)]];  // V is the first columns of K
constant bool WHOLE_QUERIES [[function_constant(13)]];   // queries begin at whole vectors
constant bool WHOLE = !SPLIT;

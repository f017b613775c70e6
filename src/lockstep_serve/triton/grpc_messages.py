"""The messages of the KServe v2 gRPC protocol, package "inference".

Field numbers are those of the public protocol and of Triton's model configuration. The classes are built from the table
below, not generated: generated code must match the installed protobuf. A separate pool avoids clashes with a client's.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "inference.GRPCInferenceService"
# A message a line: its name, then fields as NAME:TYPE:NUMBER. TYPE[]: repeated; {TYPE}: a map from strings; TYPE|: one
# of the message's only oneof. A name with a dot is nested in the message before the dot. An enum is a line too: its
# values are numbered from 0.
_TABLE = """
ServerLiveRequest
ServerLiveResponse live:bool:1
ServerReadyRequest
ServerReadyResponse ready:bool:1
ModelReadyRequest name:string:1 version:string:2
ModelReadyResponse ready:bool:1
ServerMetadataRequest
ServerMetadataResponse name:string:1 version:string:2 extensions:string[]:3
ModelMetadataRequest name:string:1 version:string:2
ModelMetadataResponse name:string:1 versions:string[]:2 platform:string:3 inputs:.TensorMetadata[]:4 \
  outputs:.TensorMetadata[]:5
ModelMetadataResponse.TensorMetadata name:string:1 datatype:string:2 shape:int64[]:3
InferParameter bool_param:bool|:1 int64_param:int64|:2 string_param:string|:3 double_param:double|:4 \
  uint64_param:uint64|:5
InferTensorContents bool_contents:bool[]:1 int_contents:int32[]:2 int64_contents:int64[]:3 uint_contents:uint32[]:4 \
  uint64_contents:uint64[]:5 fp32_contents:float[]:6 fp64_contents:double[]:7 bytes_contents:bytes[]:8
ModelInferRequest model_name:string:1 model_version:string:2 id:string:3 parameters:{InferParameter}:4 \
  inputs:.InferInputTensor[]:5 outputs:.InferRequestedOutputTensor[]:6 raw_input_contents:bytes[]:7
ModelInferRequest.InferInputTensor name:string:1 datatype:string:2 shape:int64[]:3 parameters:{InferParameter}:4 \
  contents:InferTensorContents:5
ModelInferRequest.InferRequestedOutputTensor name:string:1 parameters:{InferParameter}:2
ModelInferResponse model_name:string:1 model_version:string:2 id:string:3 parameters:{InferParameter}:4 \
  outputs:.InferOutputTensor[]:5 raw_output_contents:bytes[]:6
ModelInferResponse.InferOutputTensor name:string:1 datatype:string:2 shape:int64[]:3 parameters:{InferParameter}:4 \
  contents:InferTensorContents:5
ModelStreamInferResponse error_message:string:1 infer_response:ModelInferResponse:2
ModelConfigRequest name:string:1 version:string:2
enum DataType TYPE_INVALID TYPE_BOOL TYPE_UINT8 TYPE_UINT16 TYPE_UINT32 TYPE_UINT64 TYPE_INT8 TYPE_INT16 TYPE_INT32 \
  TYPE_INT64 TYPE_FP16 TYPE_FP32 TYPE_FP64 TYPE_STRING TYPE_BF16
enum Kind KIND_AUTO KIND_GPU KIND_CPU KIND_MODEL
ModelInput name:string:1 data_type:DataType:2 dims:int64[]:4 optional:bool:8
ModelOutput name:string:1 data_type:DataType:2 dims:int64[]:3
ModelInstanceGroup count:int32:2 kind:Kind:4
ModelQueuePolicy max_queue_size:uint32:4
ModelDynamicBatching max_queue_delay_microseconds:uint64:2 default_queue_policy:ModelQueuePolicy:6
ModelParameter string_value:string:1
ModelEnsembling step:.Step[]:1
ModelEnsembling.Step model_name:string:1 model_version:int64:2 input_map:{string}:3 output_map:{string}:4
ModelTransactionPolicy decoupled:bool:1
ModelConfig name:string:1 platform:string:2 max_batch_size:int32:4 input:ModelInput[]:5 output:ModelOutput[]:6 \
  instance_group:ModelInstanceGroup[]:7 dynamic_batching:ModelDynamicBatching:11 parameters:{ModelParameter}:14 \
  ensemble_scheduling:ModelEnsembling:15 backend:string:17 model_transaction_policy:ModelTransactionPolicy:19
ModelConfigResponse config:ModelConfig:1
ModelStatisticsRequest name:string:1 version:string:2
StatisticDuration count:uint64:1 ns:uint64:2
InferStatistics success:StatisticDuration:1 fail:StatisticDuration:2 queue:StatisticDuration:3 \
  compute_input:StatisticDuration:4 compute_infer:StatisticDuration:5 compute_output:StatisticDuration:6 \
  cache_hit:StatisticDuration:7 cache_miss:StatisticDuration:8
InferBatchStatistics batch_size:uint64:1
ModelStatistics name:string:1 version:string:2 last_inference:uint64:3 inference_count:uint64:4 \
  execution_count:uint64:5 inference_stats:InferStatistics:6 batch_stats:InferBatchStatistics[]:7
ModelStatisticsResponse model_stats:ModelStatistics[]:1
RepositoryIndexRequest repository_name:string:1 ready:bool:2
RepositoryIndexResponse models:.ModelIndex[]:1
RepositoryIndexResponse.ModelIndex name:string:1 version:string:2 state:string:3 reason:string:4
"""
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
    "float": _Field.TYPE_FLOAT,
    "double": _Field.TYPE_DOUBLE,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="lockstep/inference.proto", package="inference", syntax="proto3")
    messages: dict[str, Any] = {}
    for line in _TABLE.splitlines():
        if line:
            path, *fields = line.split()
            if path == "enum":
                name, *values = fields
                enum = file.enum_type.add(name=name)
                enum.value.extend(
                    descriptor_pb2.EnumValueDescriptorProto(name=value, number=number)
                    for number, value in enumerate(values)
                )
                continue
            outer, _, inner = path.rpartition(".")
            siblings = messages[outer].nested_type if outer else file.message_type
            message = siblings.add(name=inner)
            messages[path] = message
            for field in fields:
                _add_field(message, path, *field.split(":"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {path: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{path}")) for path in messages}


def _add_field(message: Any, path: str, name: str, kind: str, number: str) -> None:
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if kind.endswith("[]"):
        kind = kind[:-2]
        field.label = _Field.LABEL_REPEATED
    elif kind.endswith("|"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        kind = kind[:-1]
        field.oneof_index = 0
    elif kind.startswith("{"):
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, path, "key", "string", "1")
        _add_field(entry, path, "value", kind[1:-1], "2")
        kind = f".{entry.name}"
        field.label = _Field.LABEL_REPEATED
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    elif kind.startswith("."):  # nested in this message
        field.type_name = f".inference.{path}{kind}"
    else:  # a message or an enum: the pool knows which
        field.type_name = f".inference.{kind}"


MESSAGES = _classes()

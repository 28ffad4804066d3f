"""The sentences that people read, in English and Chinese, by reason.

Owns the wording; it never decides when a sentence is used. Stored failures keep reason
and parameters, so wording can change and each reader gets their language. Every reason
has both languages with the same parameters (tested).
"""

from __future__ import annotations

from collections.abc import Mapping

LANGUAGES = ("en", "zh")

# reason -> (English, Chinese). Each English sentence says what is wrong and what to do.
SENTENCES: Mapping[str, tuple[str, str]] = {
    # The document is at fault.
    "EMPTY_DOCUMENT": (
        "The file is empty or holds only white space; upload a file with text.",
        "文件为空或只有空白字符，请上传含有文字的文件。",
    ),
    "UNSUPPORTED_TYPE": (
        "Files of type {detected} cannot be read; accepted are {accepted}.",
        "无法读取 {detected} 类型的文件；支持的类型：{accepted}。",
    ),
    "BINARY_OR_UNKNOWN": (
        "The file is not readable as text and its format is unknown; save it as one of {accepted}.",
        "文件无法按文本读取，且格式未知；请另存为以下类型之一：{accepted}。",
    ),
    "UNKNOWN_ENCODING": (
        "The text is not valid UTF-8; save the file as UTF-8 and upload it again.",
        "文本不是有效的 UTF-8 编码；请以 UTF-8 保存后重新上传。",
    ),
    "PASSWORD_PROTECTED": (
        "The {file_type} is protected by a password; upload it without one.",
        "该 {file_type} 文件受密码保护，请上传无密码的版本。",
    ),
    "CORRUPT_FILE": (
        "The {file_type} is damaged and cannot be opened; export it again and upload the new file.",
        "该 {file_type} 文件已损坏，无法打开；请重新导出后上传。",
    ),
    "TOO_LARGE": (
        "The file has {actual} bytes, the limit is {limit}; split it or ask the operator for a higher limit.",
        "文件大小为 {actual} 字节，上限为 {limit} 字节；请拆分文件或请管理员提高上限。",
    ),
    "TOO_MANY_PAGES": (
        "The file has {actual} pages, the limit is {limit}; split it.",
        "文件共 {actual} 页，上限为 {limit} 页；请拆分文件。",
    ),
    "TOO_MUCH_TEXT": (
        "The file holds more text than the limit of {limit} characters; split it.",
        "文件文字超过上限 {limit} 个字符；请拆分文件。",
    ),
    "NO_TEXT": (
        "No text was found in the file; there is nothing to search for.",
        "文件中没有找到文字，无法检索。",
    ),
    "NO_TEXT_LAYER": (
        "The {pages} pages are images without text; run text recognition (OCR) and upload the result.",
        "文件的 {pages} 页均为没有文字层的图像；请先进行文字识别（OCR）再上传。",
    ),
    "PARSE_TIMEOUT": (
        "Reading the file took longer than {limit} seconds and was stopped; simplify or split the file.",
        "解析文件超过 {limit} 秒，已被终止；请简化或拆分文件。",
    ),
    "PARSE_MEMORY": (
        "Reading the file needs more memory than the limit allows; simplify or split the file.",
        "解析文件所需内存超过上限；请简化或拆分文件。",
    ),
    "PARSE_CRASH": (
        "The parser for {file_type} crashed on this file; export it again or save it in another format.",
        "{file_type} 解析器处理该文件时崩溃；请重新导出或换一种格式保存。",
    ),
    "SIZE_MISMATCH": (
        "{received} bytes arrived but {declared} were declared; send the file again.",
        "声明 {declared} 字节，实际收到 {received} 字节；请重新发送文件。",
    ),
    "CHECKSUM_MISMATCH": (
        "The SHA-256 of the received bytes is {received}, not {declared}; send the file again.",
        "收到内容的 SHA-256 为 {received}，与声明的 {declared} 不符；请重新发送文件。",
    ),
    # Why a document stands where it stands.
    "WILL_BE_RETRIED": (
        "Attempt {attempt} of {max_attempts} failed for now and will be retried: {cause}",
        "第 {attempt}/{max_attempts} 次处理暂时失败，系统将自动重试：{cause}",
    ),
    "LEASE_EXPIRED": (
        "The worker's lease expired and the maximum number of attempts was reached; "
        "check the workers, then retry the document.",
        "Worker 租约过期且已达到最大尝试次数；请检查 Worker 后重试该文档。",
    ),
    "CANCELLED": (
        "Processing was cancelled on request; retry the document to start again.",
        "处理已按请求取消；重试该文档可重新开始。",
    ),
    "SUPERSEDED": (
        "A newer version of the document was submitted before this one was finished; follow the newer one.",
        "该版本处理完成之前已提交了文档的新版本；请关注新版本。",
    ),
    "INTERNAL": (
        "An unforeseen error happened on our side; the operator finds it in the logs under trace {trace_id}.",
        "系统内部发生意外错误；管理员可在日志中以跟踪号 {trace_id} 查找。",
    ),
    # The call is at fault.
    "FIELD_INVALID": (
        "{field} is not valid: {problem}.",
        "字段 {field} 无效：{problem}。",
    ),
    "FIELD_REQUIRED": ("{field} is missing.", "缺少字段 {field}。"),
    "HEADER_EXPECTED": (
        "The first message of an upload must be the header, and there is only one.",
        "上传的第一条消息必须是 header，且只能有一条。",
    ),
    "TRAILER_EXPECTED": (
        "The upload ended without its trailer, so it is not known to be complete; send it again.",
        "上传结束时没有收到 trailer，无法确认内容完整；请重新发送。",
    ),
    "UPLOAD_STALLED": (
        "No data arrived for {seconds} seconds, so the upload was ended; send the file again.",
        "{seconds} 秒内没有收到数据，上传已终止；请重新发送文件。",
    ),
    "INLINE_TOO_LARGE": (
        "Inline content has {actual} bytes, the limit is {limit}; use the upload stream.",
        "内联内容为 {actual} 字节，上限为 {limit} 字节；请使用流式上传。",
    ),
    "PAGE_TOKEN_INVALID": (
        "The page token is not one of this list; start again without one.",
        "分页标记不属于此列表；请从第一页重新开始。",
    ),
    "RESUME_TOKEN_INVALID": (
        "The resume token is not one of this stream; start again without one.",
        "续传标记不属于此流；请重新开始。",
    ),
    "DOCUMENT_NOT_FOUND": (
        "There is no document {document}; it may have been deleted.",
        "文档 {document} 不存在，可能已被删除。",
    ),
    "COLLECTION_NOT_FOUND": (
        "There is no collection {collection}; submitting a document to it creates it.",
        "集合 {collection} 不存在；向其提交文档即可创建。",
    ),
    "VERSION_NOT_FOUND": (
        "Document {document} has no chunks of version {version}.",
        "文档 {document} 没有版本 {version} 的分块。",
    ),
    "ASSET_NOT_FOUND": (
        "Document {document} has no asset {asset}.",
        "文档 {document} 没有资源 {asset}。",
    ),
    "BLOB_MISSING": (
        "The stored original is missing; submit the same file again, then retry the document.",
        "文档的原始文件已丢失；请重新提交同一文件，然后重试该文档。",
    ),
    "BLOB_DAMAGED": (
        "The stored original is not what was submitted; submit the same file again, then retry the document.",
        "存储的原始文件与提交内容不一致；请重新提交同一文件，然后重试该文档。",
    ),
    "MODEL_UNSUITABLE": (
        "The embedding model cannot be used here: {cause}; start the embedder with another model.",
        "该向量模型无法使用：{cause}；请换用其他模型启动向量化服务。",
    ),
    "DOCUMENT_EXISTS": (
        "The same document is there already as {document}; choose another duplicate policy to replace it.",
        "相同的文档已存在：{document}；如需替换或保留两份，请选择其他重复策略。",
    ),
    "SOURCE_KEY_TAKEN": (
        "Source key {source_key} belongs to document {document}; a second one needs another key or none.",
        "来源键 {source_key} 已属于文档 {document}；第二份文档需要使用其他键或不使用键。",
    ),
    "REQUEST_ID_REUSED": (
        "Request id {request_id} was used for other content; use a new id for a new request.",
        "请求编号 {request_id} 已用于其他内容；新请求请使用新编号。",
    ),
    "DOCUMENT_NOT_FAILED": (
        "Document {document} is {status}; only a FAILED document can be retried.",
        "文档 {document} 的状态为 {status}；只有 FAILED 的文档可以重试。",
    ),
    "DOCUMENT_NOT_RUNNING": (
        "Document {document} is {status}; there is nothing to cancel.",
        "文档 {document} 的状态为 {status}；没有可取消的处理。",
    ),
    "ETAG_MISMATCH": (
        "Document {document} has changed since it was read; read it again and decide anew.",
        "文档 {document} 在读取之后已发生变化；请重新读取后再决定。",
    ),
    # What we depend on.
    "DATABASE_UNAVAILABLE": (
        "The database does not answer at the moment; try again shortly.",
        "数据库暂时没有响应；请稍后再试。",
    ),
    "EMBEDDER_UNAVAILABLE": (
        "The embedder does not answer at the moment; try again shortly.",
        "向量化服务暂时没有响应；请稍后再试。",
    ),
    "EMBEDDER_OVERLOADED": (
        "The embedder has more work than it can do in time; try again shortly.",
        "向量化服务负载过高；请稍后再试。",
    ),
    "UNAVAILABLE": (
        "A service that is needed does not answer at the moment; try again shortly.",
        "所需的服务暂时没有响应；请稍后再试。",
    ),
    "OVERLOADED": (
        "The service has more work than it can do in time; try again shortly.",
        "服务负载过高；请稍后再试。",
    ),
    "STORAGE_UNAVAILABLE": (
        "The file storage does not answer at the moment; try again shortly.",
        "文件存储暂时没有响应；请稍后再试。",
    ),
    "PARSER_UNAVAILABLE": (
        "The parser process could not be started or was killed by the system; it will be tried again.",
        "解析进程无法启动或被系统终止；将会重试。",
    ),
    "SHUTTING_DOWN": (
        "The service is stopping; connect again and repeat the call.",
        "服务正在停止；请重新连接并重试。",
    ),
    "DEADLINE_EXCEEDED": (
        "The call took longer than its deadline allows; give it more time or ask for less.",
        "调用超过了截止时间；请给更多时间或减少请求内容。",
    ),
    "EMBEDDING_MODEL_MISMATCH": (
        "Vectors of this collection were made by model {expected}, the embedder runs {actual}; "
        "start the embedder with the collection's model or use another collection.",
        "该集合的向量由模型 {expected} 生成，而向量化服务当前为 {actual}；"
        "请用该集合的模型启动向量化服务，或使用其他集合。",
    ),
    "LEASE_LOST": (
        "Another worker has taken over the job; nothing was written.",
        "任务已被其他 Worker 接管；未写入任何内容。",
    ),
    # The embedder's own refusals.
    "INPUT_TOO_LONG": (
        "Input {index} has {tokens} tokens, the model reads {limit}; split it or allow truncation.",
        "第 {index} 条输入有 {tokens} 个词元，模型上限为 {limit}；请拆分或允许截断。",
    ),
    "INPUT_EMPTY": (
        "Input {index} is empty; there is nothing to embed.",
        "第 {index} 条输入为空，无法向量化。",
    ),
    "TOO_MANY_INPUTS": (
        "The call has {actual} inputs, the limit is {limit}; split it.",
        "调用包含 {actual} 条输入，上限为 {limit}；请拆分。",
    ),
    "TOO_MANY_BYTES": (
        "The call has {actual} bytes of text, the limit is {limit}; split it.",
        "调用包含 {actual} 字节文本，上限为 {limit}；请拆分。",
    ),
    "VECTOR_INVALID": (
        "The model gave no usable vector for input {index}; change or remove the text.",
        "模型未能为第 {index} 条输入生成可用向量；请修改或删除该文本。",
    ),
    # Warnings: the document is READY all the same.
    "MODEL_LACKS_LANGUAGE": (
        "{percent} % of the text is unknown to the embedding model, search by meaning will hardly find it; "
        "use a multilingual model.",
        "文本中有 {percent}% 的内容为向量模型所不识，语义检索很难命中；请使用多语言模型。",
    ),
    "PAGE_WITHOUT_TEXT": (
        "Page {page} has no text layer and was left out; run text recognition (OCR) to include it.",
        "第 {page} 页没有文字层，已跳过；请进行文字识别（OCR）后重新上传。",
    ),
    "TYPE_MISMATCH": (
        "The file was sent as {declared} but is {detected}; it was read as {detected}.",
        "文件声明为 {declared}，实际为 {detected}；已按 {detected} 读取。",
    ),
    "CJK_FONT_MISSING": (
        "No Chinese font is installed, so Chinese text of PDF files without embedded fonts may be missing.",
        "系统未安装中文字体，未嵌入字体的 PDF 中的中文可能缺失。",
    ),
    "HIDDEN_TEXT": (
        "{count} hidden characters were left out.",
        "已忽略 {count} 个隐藏字符。",
    ),
    "CONTROL_CHARACTERS_REMOVED": (
        "{count} control characters were removed.",
        "已移除 {count} 个控制字符。",
    ),
}

# What is wrong with a field: the fact `problem` of FIELD_INVALID names one of these.
PROBLEMS: Mapping[str, tuple[str, str]] = {
    "UNKNOWN_VALUE": ("the value is unknown", "取值未知"),
    "EMPTY": ("it is empty", "内容为空"),
    "NEGATIVE": ("it must not be negative", "不能为负数"),
    "OUT_OF_RANGE": ("it must be {range}", "取值必须为 {range}"),
    "TOO_MANY_CHARACTERS": (
        "it has {actual} characters, the limit is {limit}",
        "共 {actual} 个字符，上限为 {limit}",
    ),
    "TOO_MANY_BYTES": ("it has {actual} bytes, the limit is {limit}", "共 {actual} 字节，上限为 {limit}"),
    "TOO_MANY_ENTRIES": ("it has {actual} entries, the limit is {limit}", "共 {actual} 项，上限为 {limit}"),
    "CONTROL_CHARACTERS": ("it holds control characters", "含有控制字符"),
    "NUL_CHARACTER": ("it holds the character U+0000", "含有字符 U+0000"),
    "NOT_JSON": ("it must be an object of plain JSON values", "必须是由普通 JSON 值组成的对象"),
    "NOT_A_UUID": ("it must be a UUID", "必须是 UUID"),
    "NOT_A_COLLECTION": (
        "it must be collections/ and a name of up to 63 of a-z, 0-9, -, _ and ., first a letter or digit",
        "必须是 collections/ 加上 1 至 63 位的名称（a-z、0-9、-、_、.，以字母或数字开头）",
    ),
    "NOT_A_DOCUMENT": (
        "it must be collections/COLLECTION/documents/ID, where - stands for any collection",
        "必须是 collections/集合/documents/编号，其中 - 表示任意集合",
    ),
    "OTHER_COLLECTION": ("it is not of collection {collection}", "不属于集合 {collection}"),
    "NEEDS_NAMES": ("it needs the names of the documents", "需要给出文档名称"),
}


def render(reason: str, parameters: Mapping[str, str], language: str = "en") -> str:
    """Returns the sentence of `reason`; a reason from a newer release is shown by its name."""
    sentences = SENTENCES.get(reason)
    if sentences is None:
        listed = ", ".join(f"{name}={value}" for name, value in sorted(parameters.items()))
        return f"{reason} ({listed})" if listed else reason
    facts = _Facts(parameters)
    if (problem := PROBLEMS.get(facts.get("problem", ""))) is not None:
        facts["problem"] = _in(language, problem).format_map(_Facts(parameters))
    return _in(language, sentences).format_map(facts)


def _in(language: str, texts: tuple[str, str]) -> str:
    return texts[1] if language == "zh" else texts[0]


class _Facts(dict[str, str]):
    """A missing fact is shown as a question mark: a sentence must never fail to render."""

    def __missing__(self, key: str) -> str:
        return "?"

// What we ask of HBase's two Thrift servers and happybase cannot say. Thrift knows calls by name and fields by number;
// names of structs and fields are ours. Everything that carries bytes is `binary`: a reply is never decoded twice.

// ---- Thrift 1 (port 9090): rows ------------------------------------------------------------------------------------

// happybase's has no cacheBlocks.
struct Scan {
  1: optional binary startRow
  2: optional binary stopRow
  4: optional list<binary> columns
  5: optional i32 caching
  6: optional binary filterString
  10: optional bool cacheBlocks
}

service Cluster {
  binary getClusterId()
}

// ---- Thrift 2 (port 9091 by habit): tables -------------------------------------------------------------------------

struct TableName {
  1: optional binary space
  2: binary name
}

enum Bloom { NONE = 0, ROW = 1, ROWCOL = 2, ROWPREFIX_FIXED_LENGTH = 3 }

enum Compression { LZO = 0, GZ = 1, NONE = 2, SNAPPY = 3, LZ4 = 4, BZIP2 = 5, ZSTD = 6 }

enum BlockEncoding { NONE = 0, PREFIX = 2, DIFF = 3, FAST_DIFF = 4, ROW_INDEX_V1 = 7 }

enum KeepDeleted { FALSE = 0, TRUE = 1, TTL = 2 }

struct Family {
  1: binary name
  5: optional Bloom bloom
  6: optional Compression compression
  8: optional BlockEncoding blockEncoding
  9: optional KeepDeleted keepDeleted
  10: optional i32 maxVersions
  11: optional i32 minVersions
  13: optional i32 ttlSeconds
  14: optional bool blockCache
}

struct TableDescriptor {
  1: TableName table
  2: optional list<Family> families
  3: optional map<binary, binary> attributes
}

struct NamespaceDescriptor {
  1: binary name
}

exception IOError2 {
  1: optional binary message
  2: optional bool canRetry
}

service HbaseAdmin {
  TableDescriptor getTableDescriptor(1: TableName table) throws (1: IOError2 io)

  bool tableExists(1: TableName table) throws (1: IOError2 io)

  void createTable(1: TableDescriptor table, 2: list<binary> splitKeys) throws (1: IOError2 io)

  list<binary> listNamespaces() throws (1: IOError2 io)

  void createNamespace(1: NamespaceDescriptor space) throws (1: IOError2 io)
}

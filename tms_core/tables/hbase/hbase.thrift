// What we ask of HBase's two Thrift servers, and no more. Thrift knows calls by name and fields by number; names of
// structs and fields are ours. Everything that carries bytes is `binary`, messages too: a reply is never decoded twice.

// ---- Thrift 1 (port 9090): rows ------------------------------------------------------------------------------------

typedef map<binary, binary> Attributes

struct Cell {
  1: binary value
  2: i64 timestamp
}

struct RowResult {
  1: binary row
  2: optional map<binary, Cell> columns
}

struct RegionInfo {
  1: binary startKey
  2: binary endKey
  3: i64 id
  4: binary name
}

struct Mutation {
  1: bool isDelete
  2: binary column
  3: binary value
}

struct BatchMutation {
  1: binary row
  2: list<Mutation> mutations
}

struct Scan {
  1: optional binary startRow
  2: optional binary stopRow
  4: optional list<binary> columns
  5: optional i32 caching
  6: optional binary filterString
  10: optional bool cacheBlocks
}

// canRetry is Java's "this was no DoNotRetryIOException"; servers before 2.0 do not send it.
exception IOError {
  1: binary message
  2: bool canRetry
}

exception IllegalArgument {
  1: binary message
}

exception AlreadyExists {
  1: binary message
}

// What is not set is sent as nothing, and the server then takes the first interface's defaults: three versions, no Bloom
// filter, no block cache, no end of life.
struct ColumnFamily {
  1: optional binary name
  2: optional i32 maxVersions
  3: optional binary compression
  5: optional binary bloom
  8: optional bool blockCache
  9: optional i32 ttlSeconds
}

service Hbase {
  list<RowResult> getRow(1: binary table, 2: binary row, 3: Attributes attributes) throws (1: IOError io)

  list<RowResult> getRows(1: binary table, 2: list<binary> rows, 3: Attributes attributes) throws (1: IOError io)

  list<RowResult> getRowsWithColumns(1: binary table, 2: list<binary> rows, 3: list<binary> columns,
                                     4: Attributes attributes) throws (1: IOError io)

  void mutateRows(1: binary table, 2: list<BatchMutation> rows, 3: Attributes attributes)
    throws (1: IOError io, 2: IllegalArgument argument)

  void mutateRowsTs(1: binary table, 2: list<BatchMutation> rows, 3: i64 timestamp, 4: Attributes attributes)
    throws (1: IOError io, 2: IllegalArgument argument)

  bool checkAndPut(1: binary table, 2: binary row, 3: binary column, 5: binary value, 6: Mutation put,
                   7: Attributes attributes)
    throws (1: IOError io, 2: IllegalArgument argument)

  i32 scannerOpenWithScan(1: binary table, 2: Scan scan, 3: Attributes attributes) throws (1: IOError io)

  list<RowResult> scannerGetList(1: i32 scanner, 2: i32 rows) throws (1: IOError io, 2: IllegalArgument argument)

  void scannerClose(1: i32 scanner) throws (1: IOError io, 2: IllegalArgument argument)

  list<binary> getTableNames() throws (1: IOError io)

  list<RegionInfo> getTableRegions(1: binary table) throws (1: IOError io)

  map<binary, ColumnFamily> getColumnDescriptors(1: binary table) throws (1: IOError io)

  void createTable(1: binary table, 2: list<ColumnFamily> families)
    throws (1: IOError io, 2: IllegalArgument argument, 3: AlreadyExists exists)

  void majorCompact(1: binary tableOrRegion) throws (1: IOError io)

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

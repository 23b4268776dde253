package co.cask.cdap.data2.util.hbase;

import co.cask.cdap.data2.util.TableId;
import co.cask.cdap.spi.hbase.HBaseDDLExecutor;
import java.io.IOException;
import java.util.List;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hbase.Coprocessor;
import org.apache.hadoop.hbase.HColumnDescriptor;
import org.apache.hadoop.hbase.HRegionInfo;
import org.apache.hadoop.hbase.HTableDescriptor;
import org.apache.hadoop.hbase.client.HBaseAdmin;
import org.apache.hadoop.hbase.client.HTable;
import org.apache.hadoop.hbase.client.Scan;

/**
 * CDAP's calls that differ between versions of HBase, as far as messaging tables use them. CDAP published its classes
 * for them, one set per version, only for CDAP 4.0. They do not affect keys, salts, cells or attributes.
 */
public final class TableUtil extends HBaseTableUtil {
  @Override
  public HTable createHTable(Configuration conf, TableId table) throws IOException {
    return new HTable(conf, HTableNameConverter.toTableName(tablePrefix, table));
  }

  @Override
  public boolean tableExists(HBaseAdmin admin, TableId table) throws IOException {
    return admin.tableExists(HTableNameConverter.toTableName(tablePrefix, table));
  }

  @Override
  public ScanBuilder buildScan() {
    return new HBase11ScanBuilder();
  }

  @Override
  public ScanBuilder buildScan(Scan scan) throws IOException {
    return new HBase11ScanBuilder(scan);
  }

  @Override
  public PutBuilder buildPut(byte[] row) {
    return new HBase11PutBuilder(row);
  }

  @Override
  public GetBuilder buildGet(byte[] row) {
    return new HBase11GetBuilder(row);
  }

  /** Returns a placeholder that {@link DefaultHBase11DDLExecutor} omits: HBase 2 cannot load observers for HBase 1. */
  private static Class<? extends Coprocessor> none() {
    return Coprocessor.class;
  }

  @Override
  public Class<? extends Coprocessor> getTransactionDataJanitorClassForVersion() {
    return none();
  }

  @Override
  public Class<? extends Coprocessor> getQueueRegionObserverClassForVersion() {
    return none();
  }

  @Override
  public Class<? extends Coprocessor> getDequeueScanObserverClassForVersion() {
    return none();
  }

  @Override
  public Class<? extends Coprocessor> getIncrementHandlerClassForVersion() {
    return none();
  }

  @Override
  public Class<? extends Coprocessor> getMessageTableRegionObserverClassForVersion() {
    return none();
  }

  @Override
  public Class<? extends Coprocessor> getPayloadTableRegionObserverClassForVersion() {
    return none();
  }

  @Override
  public HTableDescriptorBuilder buildHTableDescriptor(TableId table) {
    throw new UnsupportedOperationException();
  }

  @Override
  public HTableDescriptorBuilder buildHTableDescriptor(HTableDescriptor descriptor) {
    throw new UnsupportedOperationException();
  }

  @Override
  public HTableDescriptor getHTableDescriptor(HBaseAdmin admin, TableId table) {
    throw new UnsupportedOperationException();
  }

  @Override
  public boolean hasNamespace(HBaseAdmin admin, String namespace) {
    throw new UnsupportedOperationException();
  }

  @Override
  public void deleteTable(HBaseDDLExecutor executor, TableId table) {
    throw new UnsupportedOperationException();
  }

  @Override
  public void modifyTable(HBaseDDLExecutor executor, HTableDescriptor descriptor) {
    throw new UnsupportedOperationException();
  }

  @Override
  public List<HRegionInfo> getTableRegions(HBaseAdmin admin, TableId table) {
    throw new UnsupportedOperationException();
  }

  @Override
  public List<TableId> listTablesInNamespace(HBaseAdmin admin, String namespace) {
    throw new UnsupportedOperationException();
  }

  @Override
  public List<TableId> listTables(HBaseAdmin admin) {
    throw new UnsupportedOperationException();
  }

  @Override
  public void setCompression(HColumnDescriptor family, CompressionType type) {
    throw new UnsupportedOperationException();
  }

  @Override
  public void setBloomFilter(HColumnDescriptor family, BloomType type) {
    throw new UnsupportedOperationException();
  }

  @Override
  public CompressionType getCompression(HColumnDescriptor family) {
    throw new UnsupportedOperationException();
  }

  @Override
  public BloomType getBloomFilter(HColumnDescriptor family) {
    throw new UnsupportedOperationException();
  }

  @Override
  public boolean isGlobalAdmin(Configuration conf) {
    throw new UnsupportedOperationException();
  }
}
